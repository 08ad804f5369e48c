"""The engine contract and its adapters: echo, sim and SGLang."""
