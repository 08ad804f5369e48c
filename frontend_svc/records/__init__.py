"""Files of records: the audit log and the request trace."""
