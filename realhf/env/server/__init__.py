from realhf.base.extras import needs

needs("env", "fastapi", "uvicorn", "prometheus_client")
