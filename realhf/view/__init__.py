from realhf.base.installation import needs

needs("server", "starlette", "uvicorn")
