"""Output that follows a JSON schema: schemas, their compilation, and token masks. Knows no HTTP."""
