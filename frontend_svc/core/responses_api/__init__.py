"""The OpenAI Responses API: bodies, translation to chats, events, stored responses."""
