//! The mirror of every worker's KV cache and the radix snapshot that shards read.
//! Knows blocks and slots; never knows a request.
