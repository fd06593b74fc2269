"""TFRecord files without TensorFlow: the offsets of records, checked records, and a `tf.train.Example` as arrays.

A record is its length (8 bytes), the length's checksum (4), the data, and the data's checksum (4): CRC-32C, masked
(https://www.tensorflow.org/tutorials/load_data/tfrecord). protobuf parses the examples. `pip install google-crc32c`.
"""

import struct

import google_crc32c
import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, text_format

SCHEMA = """name: "example.proto" package: "tensorflow" syntax: "proto3"
message_type { name: "BytesList" field { name: "value" number: 1 label: LABEL_REPEATED type: TYPE_BYTES } }
message_type { name: "FloatList" field { name: "value" number: 1 label: LABEL_REPEATED type: TYPE_FLOAT } }
message_type { name: "Int64List" field { name: "value" number: 1 label: LABEL_REPEATED type: TYPE_INT64 } }
message_type { name: "Feature" oneof_decl { name: "kind" }
  field { name: "bytes_list" number: 1 type_name: "BytesList" oneof_index: 0 }
  field { name: "float_list" number: 2 type_name: "FloatList" oneof_index: 0 }
  field { name: "int64_list" number: 3 type_name: "Int64List" oneof_index: 0 } }
message_type { name: "Features" field { name: "feature" number: 1 label: LABEL_REPEATED type_name: "FeatureEntry" }
  nested_type { name: "FeatureEntry" options { map_entry: true }
    field { name: "key" number: 1 type: TYPE_STRING } field { name: "value" number: 2 type_name: "Feature" } } }
message_type { name: "Example" field { name: "features" number: 1 type_name: "Features" } }"""
POOL = descriptor_pool.DescriptorPool()
POOL.Add(text_format.Parse(SCHEMA, descriptor_pb2.FileDescriptorProto()))
Example = message_factory.GetMessageClass(POOL.FindMessageTypeByName("tensorflow.Example"))
"""`tf.train.Example` (tensorflow/core/example/example.proto and feature.proto)."""

LENGTH, CHECKSUM = struct.Struct("<Q"), struct.Struct("<I")
DTYPES = {"int64_list": "int64", "float_list": "float32", "bytes_list": "object"}


def record_offsets(path):
    """Return the offset of each record of a file; only the headers are read."""
    offsets, offset, size = [], 0, path.stat().st_size
    with path.open("rb") as file:
        while offset < size:
            offsets.append(offset)
            (length,) = LENGTH.unpack(_checked(file, offset, LENGTH.size))
            offset += LENGTH.size + length + 2 * CHECKSUM.size
    if offset > size:
        raise ValueError(f"{path} must end with a whole record; it is cut at byte {size:,}: copy it again")
    return offsets


def read_record(path, offset):
    """Return the bytes of the record at an offset."""
    with path.open("rb") as file:
        (length,) = LENGTH.unpack(_checked(file, offset, LENGTH.size))
        return _checked(file, offset + LENGTH.size + CHECKSUM.size, length)


def as_arrays(record):
    """Return the features of a serialised `tf.train.Example`: name -> NumPy array [n]."""
    features = Example.FromString(record).features.feature
    kinds = ((name, feature, feature.WhichOneof("kind")) for name, feature in features.items())
    return {name: np.array(getattr(feature, kind).value, DTYPES[kind]) for name, feature, kind in kinds if kind}


def write_records(path, examples):
    """Write examples, each a dict of name -> floats."""
    with path.open("wb") as file:
        for example in examples:
            message = Example()
            for name, values in example.items():
                message.features.feature[name].float_list.value.extend(values)
            data = message.SerializeToString(deterministic=True)
            for part in (LENGTH.pack(len(data)), data):
                file.write(part + CHECKSUM.pack(_masked_crc(part)))


def _checked(file, offset, size):
    """Return `size` bytes, after comparing them with the checksum that follows."""
    file.seek(offset)
    data = file.read(size + CHECKSUM.size)
    if len(data) < size + CHECKSUM.size or data[size:] != CHECKSUM.pack(_masked_crc(data[:size])):
        raise ValueError(f"{file.name} must match its checksums; at byte {offset:,} it does not: copy it again")
    return data[:size]


def _masked_crc(data):
    crc = google_crc32c.value(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
