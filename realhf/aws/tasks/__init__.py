"""Task templates of the AWS environment (one YAML file or folder per tier) and their loader."""
