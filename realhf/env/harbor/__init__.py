"""Harbor task folders as an environment: ``env.path=harbor:FOLDER``."""
