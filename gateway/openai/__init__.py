"""The OpenAI HTTP API: bodies, parameters, answers, event streams."""
