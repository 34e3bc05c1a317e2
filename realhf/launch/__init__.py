from realhf.base.installation import require_modules

require_modules("train", "torch", "transformers", "hydra")
