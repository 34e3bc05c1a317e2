from realhf.base.installation import needs

needs("env", "fastapi", "uvicorn", "prometheus_client")
