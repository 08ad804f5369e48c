// Runs the cells of one client; see tests/clients/python/cells.py.
import assert from "node:assert/strict";

export const url = `${process.env.KVMESH_URL}/v1`;
export const model = "sim";
export const hello = [{ role: "user", content: "Hello" }];
export const weatherSchema = {
  type: "object",
  properties: { city: { type: "string" }, unit: { enum: ["celsius", "fahrenheit"] } },
  required: ["city", "unit"],
  additionalProperties: false,
};
export const tool = {
  type: "function",
  function: { name: "get_weather", description: "The weather.", parameters: weatherSchema },
};
export const conversation = [
  { role: "user", content: "What is the weather in Bern?" },
  {
    role: "assistant",
    content: null,
    tool_calls: [
      {
        id: "call_1",
        type: "function",
        function: { name: "get_weather", arguments: '{"city":"Bern","unit":"celsius"}' },
      },
    ],
  },
  { role: "tool", tool_call_id: "call_1", content: "Sunny, 21 degrees." },
];

export async function post(path, body) {
  const response = await fetch(url + path, {
    method: "POST",
    headers: { "content-type": "application/json" },
    body: JSON.stringify({ model, ...body }),
  });
  assert.equal(response.status, 200);
  return response.json();
}

export async function chatText(messages) {
  const body = await post("/chat/completions", { messages });
  return body.choices[0].message.content;
}

export function expectWeather(name, input) {
  const value = typeof input === "string" ? JSON.parse(input) : input;
  assert.equal(name, "get_weather");
  assert.deepEqual(Object.keys(value).sort(), ["city", "unit"]);
  assert.equal(typeof value.city, "string");
  assert.ok(["celsius", "fahrenheit"].includes(value.unit));
}

export async function expectVectors(vectors, texts) {
  const { data } = await post("/embeddings", { input: texts });
  assert.equal(vectors.length, data.length);
  data.forEach(({ embedding }, index) => {
    assert.equal(vectors[index].length, embedding.length);
    embedding.forEach((value, at) => assert.ok(Math.abs(value - vectors[index][at]) < 1e-5));
  });
}

export async function firstWith(attempt, accepts) {
  for (let number = 0; number < 40; number++) {
    const result = await attempt(`What is the weather in city ${number}?`);
    if (accepts(result)) return result;
  }
  throw new Error("no such response to 40 prompts");
}

export async function run(client, cells) {
  const missing = process.argv.slice(2);
  for (const [feature, cell] of Object.entries(cells)) {
    const result = { client, feature, state: "ok", detail: "" };
    if (missing.includes(feature)) result.state = "-";
    else {
      try {
        await cell();
      } catch (error) {
        console.error(error);
        result.state = "FAIL";
        result.detail = String(error).slice(0, 300);
      }
    }
    console.log(`{"client": ${JSON.stringify(result).slice('{"client":'.length)}`);
  }
}
