"""The SGLang engine adapter."""
