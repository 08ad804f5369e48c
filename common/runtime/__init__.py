"""Process-wide basics: configuration, environment, logs, traces, tasks."""
