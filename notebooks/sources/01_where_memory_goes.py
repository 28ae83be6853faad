# %% [markdown] name="question"
# # 1. Where does the memory go?

# %% name="install"
# on Colab this installs what the notebook needs; anywhere else it does nothing
import subprocess
import sys

if "google.colab" in sys.modules:
    wanted = "zoo-checkpoint[notebooks]"
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", wanted], check=True)

# %% name="versions"
import platform

import torch

import zoo

device = "cuda" if torch.cuda.is_available() else "cpu"
print(f"Python {platform.python_version()}, torch {torch.__version__}, zoo {zoo.__version__}")
print(f"device: {torch.cuda.get_device_name() if device == 'cuda' else 'CPU'}")

# %% [markdown] name="remember"
# ## What to remember
#
# <details><summary>1</summary></details>
# <details><summary>2</summary></details>
# <details><summary>3</summary></details>
