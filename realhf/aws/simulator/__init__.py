from realhf.base.installation import needs

needs("env", "ministack", "awscli")
