// Order of search results: pages for operators first, decisions and the changelog last.
const LATE = ["docs/adr/", "CHANGELOG", "docs/mission-rows"];
var Scorer = {
  score: ([docname, , , , score]) =>
    score - (LATE.some((start) => docname.startsWith(start)) ? 20 : 0) + (docname.startsWith("docs/operate/") ? 5 : 0),
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
