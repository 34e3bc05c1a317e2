from realhf.base.installation import needs

needs("train", "torch", "transformers", "hydra")
