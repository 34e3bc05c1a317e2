from realhf.base.installation import require_modules

require_modules("server", "fastapi", "uvicorn", "prometheus_client")
