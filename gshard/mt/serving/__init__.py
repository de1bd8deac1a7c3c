"""Translation over HTTP: LibreTranslate's routes, a page, batches, keys, metrics, workers."""
