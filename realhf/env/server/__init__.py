from realhf.base.installation import require_modules

require_modules("env", "fastapi", "uvicorn", "prometheus_client")
