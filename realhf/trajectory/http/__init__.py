from realhf.base.installation import needs

needs("server", "fastapi", "uvicorn", "prometheus_client")
