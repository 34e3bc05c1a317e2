from realhf.base.extras import needs

needs("train", "torch", "transformers")
