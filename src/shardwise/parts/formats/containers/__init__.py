"""The containers of foreign checkpoints: pickles, torch.save files, zip archives, safetensors."""
