"""POST /v1/responses, as an adapter over chats; nothing is stored."""
