<?php
// A queue driver for Laravel that can clear a queue and list its jobs. Laravel's own driver for
// beanstalkd cannot: `queue:clear` answers "Clearing queues is not supported", and the lists of
// pending, delayed and reserved jobs are empty. Register it in a service provider:
//
//     Queue::extend('beanstalkd-server', fn () => new Beanstalkd\LaravelConnector);
//
// and set `'driver' => 'beanstalkd-server'` in the connection in config/queue.php.
declare(strict_types=1);

namespace Beanstalkd;

use Illuminate\Contracts\Queue\ClearableQueue;
use Illuminate\Queue\BeanstalkdQueue;
use Illuminate\Queue\Connectors\ConnectorInterface;
use Illuminate\Queue\Jobs\InspectedJob;
use Illuminate\Support\Collection;
use Pheanstalk\Pheanstalk;
use Pheanstalk\SocketFactory;

final class LaravelQueue extends BeanstalkdQueue implements ClearableQueue
{
    public Extensions $extensions;

    public function clear($queue)
    {
        return $this->extensions->flush($this->getQueue($queue));
    }

    public function pendingJobs($queue = null): Collection
    {
        return $this->inspect([$this->getQueue($queue)], 'ready');
    }

    public function delayedJobs($queue = null): Collection
    {
        return $this->inspect([$this->getQueue($queue)], 'delayed');
    }

    public function reservedJobs($queue = null): Collection
    {
        return $this->inspect([$this->getQueue($queue)], 'reserved');
    }

    public function allPendingJobs(): Collection
    {
        return $this->inspect($this->pheanstalk->listTubes(), 'ready');
    }

    public function allDelayedJobs(): Collection
    {
        return $this->inspect($this->pheanstalk->listTubes(), 'delayed');
    }

    public function allReservedJobs(): Collection
    {
        return $this->inspect($this->pheanstalk->listTubes(), 'reserved');
    }

    private function inspect(iterable $tubes, string $state): Collection
    {
        $jobs = [];
        foreach ($tubes as $tube) {
            // The bodies have no counters: those are in the list.
            $attempts = array_column(iterator_to_array($this->extensions->jobs("$tube", $state), false), 'reserves', 'id');
            foreach ($this->extensions->bodies("$tube", $state) as $id => $body) {
                $jobs[] = InspectedJob::fromPayload($body, $attempts[$id] ?? 0);
            }
        }
        return new Collection($jobs);
    }
}

final class LaravelConnector implements ConnectorInterface
{
    public function connect(array $config)
    {
        $extensions = new Extensions(new SocketFactory($config['host'], $config['port'] ?? 11300));
        $queue = new LaravelQueue(
            Pheanstalk::createWithFactory($extensions),
            $config['queue'],
            $config['retry_after'] ?? Pheanstalk::DEFAULT_TTR,
            $config['block_for'] ?? 0,
            $config['after_commit'] ?? false,
        );
        $queue->extensions = $extensions;
        return $queue;
    }
}
