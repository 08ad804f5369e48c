"""`meshctl doctor`: collects facts about a mesh and this host, and finds what is wrong.

`collect/` reads facts, each remote one with a time limit, and decides nothing. `checks/` turns
facts into findings (pure); `rules.py` is the table of all findings with their remedies. `report.py`
prints them.
"""
