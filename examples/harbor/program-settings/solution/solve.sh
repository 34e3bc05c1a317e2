#!/bin/bash
cat > /app/settings.py <<"END"
def read_settings(lines):
    settings = {}
    for line in lines:
        line = line.strip()
        if line and not line.startswith("#"):
            name, _, value = line.partition("=")
            settings[name.strip()] = value.strip()
    return settings
END
