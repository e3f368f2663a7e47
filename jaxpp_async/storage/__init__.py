"""Store checkpoints on disk: files of arrays, and the folder in which a set of files is a checkpoint.

- `tensor_files`: writes numpy arrays to safetensors files and reads them back, with checksums.
- `checkpoint_folder`: the names in a checkpoint's folder, its manifest, and the removal of files.
"""
