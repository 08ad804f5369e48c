"""The adapter for inference servers that run already: SGLang, vLLM and any OpenAI API."""
