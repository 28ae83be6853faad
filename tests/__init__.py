import os

# what tests capture of stderr does not depend on how long they take
os.environ.setdefault("ZOO_PROGRESS", "0")
