"""The batch service: files and batches of OpenAI's API, whose lines run on idle capacity."""
