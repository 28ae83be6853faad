"""The commands: `zoo max-batch` is `max_batch.main`, from arguments to an answer."""
