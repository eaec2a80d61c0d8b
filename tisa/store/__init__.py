"""Durable files: what is written is there whole or not at all, on the disk, and can be proved.

  files.py         a file or a folder, whole or not at all; one writer at a time
  seals.py         checksums: of JSON, bytes, tensors, lines of records, folders
  tensor_files.py  a file of tensors: its form and its seal
  verification.py  any folder: what is in it, and what of it is damaged
  repair.py        what of that can be made good

Everything in this repository that must survive a kill, a full disk, a power cut or a flipped bit is
written here, and read here. What is not as it was written is `Damaged`.
"""

from tisa.store.files import (
    alone,
    check_new_folder,
    finish_folder,
    is_unused,
    locked,
    make_folder,
    new_file,
    new_folder,
    only_writer,
    own_folder,
    renewed,
    told,
    write_bytes,
    write_text,
)
from tisa.store.seals import (
    CODE,
    MANIFEST,
    Damaged,
    Lines,
    Manifest,
    check_folder,
    manifest_of,
    opened,
    read_bytes,
    read_json,
    seal_folder,
    sealed,
    tensors_digest,
    write_files,
    write_json,
    write_sealed,
)

__all__ = ["CODE", "MANIFEST", "Damaged", "Lines", "Manifest", "alone", "check_folder",
           "check_new_folder", "finish_folder", "is_unused", "locked", "make_folder",
           "manifest_of", "new_file", "new_folder", "only_writer", "opened", "own_folder",
           "read_bytes", "read_json", "renewed", "seal_folder", "sealed", "tensors_digest", "told",
           "write_bytes", "write_files", "write_json", "write_sealed", "write_text"]  # fmt: skip
