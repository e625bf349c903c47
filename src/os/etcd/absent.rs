//! What stands for a membership in a program without the feature `etcd`: it cannot exist, because
//! options refuse a URL of etcd.

use super::options::EtcdOptions;
use super::standing::{MembershipError, Standing};
use crate::os::disk::Directory;
use mio::Waker;

/// A server that leads, or waits until it can.
#[derive(Debug)]
pub enum Membership {}

fn refused() -> Result<Membership, MembershipError> {
    Err(MembershipError::Refused("this program was built without etcd".to_owned()))
}

impl Membership {
    pub fn join(_: &EtcdOptions) -> Result<Membership, MembershipError> {
        refused()
    }

    pub fn join_unused(_: &EtcdOptions) -> Result<Membership, MembershipError> {
        refused()
    }

    pub fn read(_: &EtcdOptions) -> Result<Membership, MembershipError> {
        refused()
    }

    pub fn set_waker(&self, _: Waker) {
        match *self {}
    }

    pub fn standing(&self) -> Result<Standing, MembershipError> {
        match *self {}
    }

    pub fn disk(&self) -> Directory {
        match *self {}
    }

    pub fn end_import(&self, _: &mut Directory) {
        match *self {}
    }

    pub fn may_answer(&self) -> bool {
        match *self {}
    }

    pub fn check(&self) -> Result<(), MembershipError> {
        match *self {}
    }
}
