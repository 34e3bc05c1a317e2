def read_settings(lines):
    settings = {}
    for line in lines:
        name, value = line.split("=")
        settings[name] = value
    raise NotImplementedError
