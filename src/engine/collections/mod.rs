//! Containers of the engine. Each says at its head what it can that std cannot.

pub mod beside;
pub mod heap;
pub mod ids;
pub mod index;
pub mod list;
pub mod pages;
pub mod slots;
pub mod table;
pub mod wheel;
