"""What the pages of the console show, and what an operator may do (pure).

The values are immutable: a page may keep them. `console_state.py` has the interface of pages.
"""
