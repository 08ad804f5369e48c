"""Which operators may use the console: logins, sessions, and the gate before all pages."""
