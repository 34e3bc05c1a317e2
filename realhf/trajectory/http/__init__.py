from realhf.base.extras import needs

needs("server", "fastapi", "uvicorn", "prometheus_client")
