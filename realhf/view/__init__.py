from realhf.base.extras import needs

needs("server", "starlette", "uvicorn")
