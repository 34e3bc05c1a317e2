"""Files: a scratch folder with tools, and tasks such as renaming, counting, editing and moving."""

from realhf.environments.files.definition import DEFINITION as DEFINITION
