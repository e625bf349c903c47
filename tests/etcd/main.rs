//! The rules of a binlog in etcd, on a fake of etcd with virtual time: nothing here depends on a clock or a network.
mod fake;
mod random;
mod rules;
mod servers;
mod store;

/// That of the program: it can refuse memory.
#[global_allocator]
static ALLOCATOR: beanstalkd::Allocator = beanstalkd::Allocator;
