"""The endpoint picker: it chooses a server for each request of a gateway, over ext_proc."""
