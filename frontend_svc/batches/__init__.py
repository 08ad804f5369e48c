"""Files and batches: the routes, which the batch service answers, and the lines that it runs."""
