"""The rules of preflight, by subject. Each looks at the resolved profile alone and knows nothing of the others."""
