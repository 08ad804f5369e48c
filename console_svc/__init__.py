"""The console: web pages that show a mesh to its operators."""
