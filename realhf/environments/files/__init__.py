"""Files: a scratch folder with tools, and tasks such as renaming, counting, editing and moving."""
