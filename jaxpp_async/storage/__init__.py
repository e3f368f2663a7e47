"""Store checkpoints on disk. A checkpoint is a folder with files of arrays and a manifest that names them.

- `tensor_files`: writes numpy arrays to safetensors files and reads them back, with checksums.
- `checkpoint_folder`: names the files in a checkpoint's folder, replaces the manifest, and removes files.
"""
