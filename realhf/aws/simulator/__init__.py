from realhf.base.extras import needs

needs("env", "ministack", "awscli")
