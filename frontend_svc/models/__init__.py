"""The served models: catalog, tokenizers and model card artifacts."""
