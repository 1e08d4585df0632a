"""The worker process: it owns the device, keeps every row's state there and runs rounds."""
