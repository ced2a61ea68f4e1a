"""The measurements of `palestra bench`: sampling and training speed."""
