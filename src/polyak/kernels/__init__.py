"""Fast stand-ins for plain functions; each says what it replaces, what it gains, and when to delete it."""
