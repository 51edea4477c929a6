"""POST /v1/messages, the API of Anthropic's clients, as an adapter over chats."""
